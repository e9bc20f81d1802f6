terraform {
  required_version = ">= 1.5"

  required_providers {
    nebius = {
      source  = "terraform-provider.storage.eu-north1.nebius.cloud/nebius/nebius"
      version = "0.6.73"
    }
  }
}

# Credentials come from the environment: NEBIUS_IAM_TOKEN, or a service account's NB_AUTHKEY_PRIVATE_PATH (a file),
# NB_AUTHKEY_PUBLIC_ID and NB_SA_ID.
provider "nebius" {
  service_account = !var.service_account ? null : {
    private_key_file_env = "NB_AUTHKEY_PRIVATE_PATH"
    public_key_id_env    = "NB_AUTHKEY_PUBLIC_ID"
    account_id_env       = "NB_SA_ID"
  }
}
