"""Every engine in a process of its own: what it yields and how that travels."""
