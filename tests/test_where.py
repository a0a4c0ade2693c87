import jax

from jaxroll.where import default_platform, platform_of


def test_the_default_is_what_jax_would_use():
  assert platform_of({}) == default_platform() == jax.default_backend()


def test_the_default_device_counts():
  with jax.default_device(jax.devices("cpu")[1]):
    assert default_platform() == "cpu"


def test_options_of_jit_count():
  assert platform_of({"backend": "tpu"}) == "tpu"
  assert platform_of({"device": jax.devices("cpu")[0]}) == "cpu"
  mesh = jax.make_mesh((8,), ("i",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
  assert platform_of({"in_shardings": (None, {"a": sharding})}) == "cpu"
