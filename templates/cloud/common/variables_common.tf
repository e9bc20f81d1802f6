# Of every provider: see variables.tf.

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

variable "boot_disk_gb" {
  description = "Size of each boot disk, in GiB."
  type        = number
}

variable "boot_disk_type" {
  description = "Type of each boot disk."
  type        = string
}

variable "shared_gb" {
  description = "Size of the shared filesystem, in GiB."
  type        = number
}

variable "ssh_from" {
  description = "Networks that may reach the head by ssh; nobody else may reach anything."
  type        = list(string)

  validation {
    condition     = length(var.ssh_from) > 0 && alltrue([for network in var.ssh_from : can(cidrhost(network, 0))])
    error_message = "At least one network, such as 203.0.113.7/32."
  }

  validation {
    condition     = var.open_to_world || alltrue([for network in var.ssh_from : tonumber(split("/", network)[1]) >= (strcontains(network, ":") ? 32 : 8)])
    error_message = "This lets a large part of the world try. Name your networks, or set open_to_world."
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

variable "labels" {
  description = "Labels of everything that can have them."
  type        = map(string)
  default     = {}
}
