"""What several tests share: models, machines, workers, clients. Nothing here is a test."""
