"""What clients may send: the shapes of requests, and what is checked of them."""
