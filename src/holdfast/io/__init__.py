"""Movement of bytes: pipelines that stream sources to files and files to targets in bounded memory. No torch."""
