"""The scheduler and the memory policies in virtual time: traces, step costs, recorded runs, figures of papers."""
