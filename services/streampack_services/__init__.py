"""The daemons: main loops, signals, disk, HTTP and the command line around the library's pure core."""
