"""Callbacks for training frameworks: they give a framework's runs the metrics and the fault tolerance of a job."""
