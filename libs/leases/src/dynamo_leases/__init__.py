"""What discoveries have in common, for plugins: leases kept alive, stores followed, watches told."""
