output "head_address" {
  description = "Public address of the head."
  value       = google_compute_address.head.address
}

output "nodes" {
  description = "Names of the worker nodes, with their addresses inside the cluster."
  value       = { for node in google_compute_instance.worker : node.name => node.network_interface[0].network_ip }
}

output "ssh" {
  description = "How to log in."
  value       = "ssh ${var.ssh_user}@${google_compute_address.head.address}"
}

output "submit" {
  description = "A first job, from your machine."
  value       = "ssh ${var.ssh_user}@${google_compute_address.head.address} hpcjobs submit --site ${var.name} --wait ${var.first_job}"
}
