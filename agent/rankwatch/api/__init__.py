"""What users import: ``watch``, ``detect_overflow``, ``DebugUnderflowOverflow``; and which watch speaks for the process."""
