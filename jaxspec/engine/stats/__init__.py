"""What is counted and timed, for requests and for the whole engine."""
