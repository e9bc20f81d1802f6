# What terraform.tfvars says was resolved from the site file; what has no default and is not there is asked for.

variable "project" {
  description = "Google Cloud project that the cluster belongs to and that pays for it."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "A project id has 6 to 30 small letters, digits and hyphens (it is not the project's number)."
  }
}

variable "region" {
  description = "Region of the network."
  type        = string
}

variable "zone" {
  description = "Zone of all machines."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+-[a-z]$", var.zone))
    error_message = "A zone looks like us-central1-a."
  }
}

variable "machine_type" {
  description = "Machine type of the worker nodes."
  type        = string
}

variable "gpu_type" {
  description = "Accelerator to attach to each worker node; null where there is none, or the machine type has its own."
  type        = string
  default     = null
}

variable "gpu_count" {
  description = "GPUs of each worker node, attached or its own; 0 for none."
  type        = number
  default     = 0
}

variable "image" {
  description = "Image of the worker nodes."
  type        = string
}

variable "head_machine_type" {
  description = "Machine type of the head, where people log in and Slurm's controller runs."
  type        = string
}

variable "head_image" {
  description = "Image of the head."
  type        = string
}

variable "kms_key" {
  description = "Cloud KMS key that encrypts all disks; null for keys that Google manages."
  type        = string
  default     = null
}

variable "shared_kind" {
  description = "Where the shared filesystem is: on a disk of the head (nfs), or Google's own (filestore)."
  type        = string

  validation {
    condition     = contains(["nfs", "filestore"], var.shared_kind)
    error_message = "Either nfs or filestore."
  }
}

variable "shared_tier" {
  description = "Service tier of a filestore: BASIC_HDD, BASIC_SSD, ZONAL, REGIONAL or ENTERPRISE."
  type        = string
  default     = "ZONAL"
}

variable "cidr" {
  description = "Addresses of the cluster's own subnet."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 0))
    error_message = "A network such as 10.20.0.0/24."
  }
}

variable "reservation" {
  description = "Name of a reservation that the worker nodes use; null for none."
  type        = string
  default     = null
}

variable "secure_boot" {
  description = "Whether only signed kernel modules load. The image must then bring a signed GPU driver."
  type        = bool
  default     = true
}

variable "scopes" {
  description = "What programs on the machines may do in the project's name, as access scopes."
  type        = list(string)
}
