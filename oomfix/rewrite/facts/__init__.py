"""What a script does that a rewrite has to respect: its precision, its networks, who scales its losses."""
