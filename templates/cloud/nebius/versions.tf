terraform {
  required_version = ">= 1.5"

  required_providers {
    nebius = {
      source  = "terraform-provider.storage.eu-north1.nebius.cloud/nebius/nebius"
      version = "0.6.73"
    }
  }
}

# Credentials come from the environment: NEBIUS_IAM_TOKEN.
provider "nebius" {
}
