terraform {
  required_version = ">= 1.5"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "8.7.0"
    }
  }
}

# Credentials come from the environment: GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`.
provider "google" {
  project = var.project
  region  = var.region
  zone    = var.zone
}
