"""What a memory budget costs: measured peaks and times of models under budgets, beside what else saves memory."""
