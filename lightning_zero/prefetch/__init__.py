"""When parameters are gathered and given back."""
