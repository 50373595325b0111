"""What users need to test their trainers."""
