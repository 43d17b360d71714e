"""What the engine tells about itself: spans of time, and counts."""
