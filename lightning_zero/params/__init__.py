"""What a module's weight is: buckets of parameters, their states and their storage."""
