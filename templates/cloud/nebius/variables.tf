# What terraform.tfvars says was resolved from the site file; what has no default and is not there is asked for.

variable "project" {
  description = "Nebius project that the cluster belongs to and that pays for it."
  type        = string

  validation {
    condition     = startswith(var.project, "project-")
    error_message = "A project id starts with project-."
  }
}

variable "platform" {
  description = "Platform of the worker nodes: the processor and the kind of GPU."
  type        = string
}

variable "preset" {
  description = "Preset of the worker nodes: how many GPUs and CPUs, how much memory."
  type        = string
}

variable "image_family" {
  description = "Image family of the worker nodes."
  type        = string
}

variable "head_platform" {
  description = "Platform of the head, where people log in and Slurm's controller runs."
  type        = string
}

variable "head_preset" {
  description = "Preset of the head."
  type        = string
}

variable "head_image_family" {
  description = "Image family of the head."
  type        = string
}

variable "fabric" {
  description = "InfiniBand fabric that joins the worker nodes; null for none."
  type        = string
  default     = null
}

variable "shared_kind" {
  description = "Where the shared filesystem is: Nebius' own (virtiofs), or a disk of the head (nfs)."
  type        = string

  validation {
    condition     = contains(["nfs", "virtiofs"], var.shared_kind)
    error_message = "Either nfs or virtiofs."
  }
}

variable "subnet" {
  description = "An existing subnet for the cluster; null makes a network of its own."
  type        = string
  default     = null

  validation {
    condition     = var.subnet == null || startswith(coalesce(var.subnet, "vpcsubnet-"), "vpcsubnet-")
    error_message = "A subnet id starts with vpcsubnet-."
  }
}

variable "reservation" {
  description = "Capacity block group that the worker nodes use; null for none."
  type        = string
  default     = null
}

variable "service_account" {
  description = "Whether the credentials are a service account's (NB_SA_ID and the others) and not NEBIUS_IAM_TOKEN."
  type        = bool
  default     = false
}
