"""Small messages between the ranks of a job, with deadlines that name who is missing."""
