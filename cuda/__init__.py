"""Native kernel sources, shipped as package data so that they can be built after an install."""
