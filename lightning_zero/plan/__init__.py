"""Pure planning on integers: no process group, no stream, no tensor."""
