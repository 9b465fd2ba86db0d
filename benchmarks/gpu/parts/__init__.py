"""What each part of a run does, in its process: `run(bench)`."""
