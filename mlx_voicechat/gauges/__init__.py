"""What a model takes and how fast it is: memory, bytes moved, frame times, launches."""
