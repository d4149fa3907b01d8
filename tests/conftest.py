"""What all tests may use. Lying here, it also makes `server_process` importable from every test."""
