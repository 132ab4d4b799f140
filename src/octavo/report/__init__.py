"""Reports of runs: the HTML page, the summary on the terminal, and JSON; and the page of `octavo verify`."""
