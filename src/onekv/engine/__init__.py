"""From prompts to tokens: sampling, and the loop that keeps several sequences going in one buffer."""
