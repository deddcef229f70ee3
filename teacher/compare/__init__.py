"""Two streams of logits in, one comparison out."""
