"""This room proves that a user's own script resumes: it runs the script with and without interruptions, and compares
what the script saved. The processes of the script are the only ones that import torch."""
