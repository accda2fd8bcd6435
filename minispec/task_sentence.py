"""Task "sentence": attributes of a venue, a product or an event -> a short description.

The idea: the answer is a fluent frame ("is a family-friendly pub in the riverside area ...")
chosen by what the attributes say, and every attribute is copied into its place in that frame.
Attributes come in any order, and some (the owner, the weight) are not to be mentioned.

Read first: words.py. Read next: tasks.py.
Proven by: tests/test_tasks.py.
"""

from minispec import words
from minispec.words import FREE, TIMES, article

# What occurs in prompts only; each sixth template is held out.
TEMPLATES = {
    "header": ("Meaning representation: {m}", "Data: {m}", "Facts: {m}", "Describe this: {m}",
               "Attributes: {m}", "Known details: {m}", "Input: {m}", "Record: {m}", "Entry: {m}",
               "Write about this: {m}", "Properties: {m}", "Put into words: {m}"),
    "field": ("{k}[{v}]", "{k}: {v}", "{k} = {v}", "{k}({v})", "<{k}> {v}", "{k} -> {v}",
              "[{k}] {v}", "({k}) {v}", "{k} is {v}", "{k} {{{v}}}", "{k} '{v}'", "{k} <- {v}"),
}


def make(draw):
    """(prompt, completion): a maker gives the attributes, which are then shuffled, and the text."""
    fields, text = draw.pick((venue, venue, product, event))(draw)
    draw.rng.shuffle(fields)
    shape = draw.template("field")
    glue = draw.pick((", ", "; ", " | "))
    meaning = glue.join(shape.format(k=key, v=value) for key, value in fields)
    return draw.line("header", m=meaning) + "\nDescription:\n", text


def rated(scale):
    if "out of" in scale:
        return f"a customer rating of {scale}"
    return f"{article(scale)} customer rating"


def priced(price):
    if price in ("cheap", "moderate", "high"):
        return f"at {price} prices"
    return f"in the price range of {price}" if "-" in price else f"for {price} a head"


def venue(draw):
    name, near = draw.some(draw.pool("venue"), 2)
    eat, food, area, scale, price = map(draw.word, ("eat", "food", "area", "scale", "range"))
    place, family = draw.name("place"), draw.pick(("yes", "no", None))
    fields = [("name", name), ("eatType", eat), ("food", food), ("area", area),
              ("customer rating", scale), ("priceRange", price)]
    has_near, has_place = draw.chance(0.6), draw.chance(0.5)
    fields += [("familyFriendly", family)] * (family is not None) + [("near", near)] * has_near
    fields += [("town", place)] * has_place
    fields += [("owner", draw.name("person"))] * draw.chance(0.4)
    where = f"in the {area} area" + f" of {place}" * has_place
    close = f", close to {near}" * has_near
    if family == "yes":
        text = (f"{name} is a family-friendly {eat} {where}{close}. "
                f"It serves {food} food {priced(price)} and has {rated(scale)}.")
    elif family == "no":
        text = (f"{name} is {article(food)} {eat} {where}{close}. "
                f"It is not family-friendly, offers food {priced(price)} and has {rated(scale)}.")
    else:
        text = (f"Located {where}{close}, {name} is {article(eat)} with {rated(scale)} "
                f"that serves {food} food {priced(price)}.")
    if draw.chance(FREE):
        text = text.replace("serves", "provides").replace(", close to", ", near")
    return fields, text


def product(draw):
    name, place, colour = draw.name("product"), draw.name("place"), draw.pick(words.KINDS["colour"])
    device, feature, use, scale = map(draw.word, ("device", "feature", "use", "scale"))
    price, months = f"${9 + 10 * int(draw.rng.random() * 90)}", draw.pick((6, 12, 18, 24, 36, 48))
    fields = [("name", name), ("type", device), ("colour", colour), ("feature", feature),
              ("price", price)]
    fields += [("weight", f"{int(draw.rng.random() * 90) / 10} kg")] * draw.chance(0.5)
    text = f"The {name} is {article(colour)} {device} with {feature} that costs {price}."
    if draw.chance(0.5):
        fields += [("rating", scale), ("good for", use)]
        text += f" It is a good choice for {use} and has {rated(scale)}."
    else:
        fields += [("made in", place), ("warranty", f"{months} months")]
        text += f" It is made in {place} and comes with a warranty of {months} months."
    return fields, text


def event(draw):
    show, title, host = draw.word("show"), draw.name("title"), draw.name("venue")
    person, place = draw.name("person"), draw.name("place")
    price = f"£{1 + int(draw.rng.random() * 60)}"
    day, time = draw.pick(words.KINDS["day"]), draw.pick(TIMES)
    fields = [("title", title), ("kind", show), ("venue", host), ("day", day), ("time", time),
              ("ticket", price)]
    fields += [("organiser", draw.name("person"))] * draw.chance(0.4)
    text = f"{title} is {article(show)} that takes place at {host} on {day} at {time}."
    if draw.chance(0.5):
        fields += [("host", person)]
        text += f" It is hosted by {person} and tickets cost {price} at the door."
    else:
        fields += [("town", place), ("booking", "required")]
        text = text.replace(host, f"{host} in {place}")
        text += f" Tickets cost {price} and must be booked in advance."
    return fields, text
