"""What a plugin implements. Every contract asks for two or three methods; anything more is a declared capability."""
