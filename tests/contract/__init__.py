"""What the library relies on in the engines it drives, as seen on the wire, held against every engine alike."""
