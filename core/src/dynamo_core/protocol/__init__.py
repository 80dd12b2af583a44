"""Values that travel between processes: plain typed structs, append-only, with no behaviour that needs the runtime."""
