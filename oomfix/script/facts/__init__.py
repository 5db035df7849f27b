"""What is known without following a script: values, torch's functions, what names say, what is defined."""
