# What terraform.tfvars says was settled from the site file; what has no default and is not there is asked for.

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

variable "name" {
  description = "Name of the cluster; machines are NAME-head, NAME-1, NAME-2 and so on."
  type        = string

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$", var.name))
    error_message = "Small letters, digits and hyphens, 32 at most, starting with a letter."
  }
}

variable "nodes" {
  description = "Worker nodes to have now, between nodes_min and nodes_max."
  type        = number

  validation {
    condition     = var.nodes >= 0 && floor(var.nodes) == var.nodes
    error_message = "A whole number of nodes, 0 or more."
  }
}

variable "nodes_min" {
  description = "Fewest worker nodes that the site allows."
  type        = number
}

variable "nodes_max" {
  description = "Most worker nodes: those that Slurm's partition knows."
  type        = number
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

variable "boot_disk_gb" {
  description = "Size of each boot disk, in GiB."
  type        = number
}

variable "boot_disk_type" {
  description = "Type of each boot disk."
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

variable "shared_gb" {
  description = "Size of the shared filesystem, in GiB."
  type        = number
}

variable "shared_tier" {
  description = "Service tier of a filestore."
  type        = string
  default     = "BASIC_HDD"
}

variable "cidr" {
  description = "Addresses of the cluster's own subnet."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 0))
    error_message = "A network such as 10.20.0.0/24."
  }
}

variable "ssh_from" {
  description = "Networks that may reach the head by ssh; nobody else may reach anything."
  type        = list(string)

  validation {
    condition     = length(var.ssh_from) > 0 && alltrue([for network in var.ssh_from : can(cidrhost(network, 0))])
    error_message = "At least one network, such as 203.0.113.7/32."
  }

  validation {
    condition     = var.open_to_world || length(setintersection(var.ssh_from, ["0.0.0.0/0", "::/0"])) == 0
    error_message = "This lets the whole world try. Name your networks, or set open_to_world."
  }
}

variable "open_to_world" {
  description = "Whether ssh_from may hold 0.0.0.0/0."
  type        = bool
  default     = false
}

variable "ssh_keys" {
  description = "Public keys of those who may log in."
  type        = list(string)

  validation {
    condition     = length(var.ssh_keys) > 0 && alltrue([for key in var.ssh_keys : can(regex("^(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/]+=* ?[A-Za-z0-9_@.:+ -]*$", key))])
    error_message = "At least one public key, such as \"ssh-ed25519 AAAA... you@laptop\"."
  }
}

variable "ssh_user" {
  description = "The cluster's one user, whose home is on the shared filesystem."
  type        = string
}

variable "first_job" {
  description = "What the output named submit runs, after `hpcjobs submit --site NAME --wait`."
  type        = string
}

variable "spot" {
  description = "Whether the worker nodes are cheaper ones that may be taken away at any moment."
  type        = bool
  default     = false
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

variable "labels" {
  description = "Labels of everything that can have them."
  type        = map(string)
  default     = {}
}
