"""Small messages between the ranks of a job, with deadlines whose errors name the missing ranks."""
