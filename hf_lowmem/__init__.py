"""Full fine-tuning of large language models on one consumer GPU, behind the Hugging Face Trainer's own flags."""
