"""Pipeline schedules as timelines: their orders, their simulation, and closed forms for the search."""

from nanoscale.plan.pipeline.boundaries import KeptBoundary, boundaries
from nanoscale.plan.pipeline.closed_forms import bubble
from nanoscale.plan.pipeline.in_flight import in_flight
from nanoscale.plan.pipeline.orders import Action, Kind, Order, order
from nanoscale.plan.pipeline.residents import Residents, residents
from nanoscale.plan.pipeline.simulation import (
    Costs,
    Span,
    Timeline,
    first_stage_undivided,
    simulate,
    simulate_schedule,
    transfers_overlap,
)

__all__ = [
    "Action",
    "Costs",
    "KeptBoundary",
    "Kind",
    "Order",
    "Residents",
    "Span",
    "Timeline",
    "boundaries",
    "bubble",
    "first_stage_undivided",
    "in_flight",
    "order",
    "residents",
    "simulate",
    "simulate_schedule",
    "transfers_overlap",
]
