"""What people see: tables for the terminal, pictures. Data comes in, nothing is computed or changed."""
