"""Worker pools of one model, by role, and the plugins that choose among them."""
