"""Language models under TRL's GRPOTrainer: generation, loss and optimizer are TRL's, recovery and the run folder ours."""
