"""From requests to answers: scheduler, batch, runner, sampler, and the loop that steps them."""
