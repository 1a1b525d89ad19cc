"""Sets the maths library as in a replica, before anything is computed."""

from warmstate.cluster.launch.strict_products import ask_for_strict_products

ask_for_strict_products()
