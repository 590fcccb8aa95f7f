"""What a machine can do: its profile of measured rates, and its copy lanes on a clock."""
