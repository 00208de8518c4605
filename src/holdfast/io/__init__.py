"""How bytes move: pipelines that stream sources to files and files to targets through bounded memory. No torch."""
