"""Clusters rented from a cloud: Terraform, start-up scripts and blueprints from a site's ``cloud:`` section."""
