"""The search for a plan: gaps between uses, a choice among them, a timetable of copies."""
