"""The abstract interpreter: follows a script statement by statement and call by call, and traces what happens."""
