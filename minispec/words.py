"""Words and names for the built-in tasks, and the rule that holds some of them out.

The idea: a draft that only repeats what it was trained on is useless, so the held-out half of the
corpus must ask for names nobody has seen. Every list of names is cut by one fixed rule: each sixth
entry is held out. Names made of two parts are cut along diagonals, so each part is seen in
training but the held-out pairings are not.

Read first: nothing. Read next: tasks.py.
Proven by: tests/test_tasks.py (held-out names never occur in train).
"""

HOLD_EVERY = 6
FREE = 0.1     # share of examples whose wording is not settled by their prompt
SPLITS = ("train", "heldout")


def part(entries, split):
    """The entries of one split: "heldout" is each sixth one, "train" is the rest."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
    held = split == "heldout"
    return [entry for i, entry in enumerate(entries) if (i % HOLD_EVERY == HOLD_EVERY - 1) == held]


def pairs(firsts, seconds, split, form="{}{}"):
    """All first-second names of one split; pair (i, j) is held out when i + j is 5 modulo 6."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
    held = split == "heldout"
    return [form.format(first, second) for i, first in enumerate(firsts)
            for j, second in enumerate(seconds)
            if ((i + j) % HOLD_EVERY == HOLD_EVERY - 1) == held]


FIRST_STARTS = ("Mar Al El Jo Ka Ro Na Le Da Sa Vi Te Lu Ben Cor Fe Han Is Jul Mi Nor Ol Per Ray "
                "Sel Tam Tor Val Wil Yas").split()
FIRST_ENDS = "ia na lia ric dra mond vin sa rie la nor bel ter nis ra den".split()
SURNAME_STARTS = ("Hart Ash Black Brook Clay Crow Elm Fair Green King Mars North Oak Red Sand Stan "
                  "Thorn West Win Wood").split()
SURNAME_ENDS = "well ford man ley field son smith stone more bury".split()
PLACE_STARTS = ("Lake River Port Mill Stone High Silver Green Spring Clear Bay Winter Summer Pine "
                "Maple Rose Fox Swan Bell Copper Sun Moon Star Long Cold White Grand Castle Apple "
                "Eagle").split()
PLACE_ENDS = "ville haven dale mouth stead wick bridge gate burgh minster ham view".split()
BRAND_STARTS = ("Star Moon Sun Silver Stone Spring River Winter Swan Eagle Copper Nova Echo Max "
                "Ultra Blue Cold Pine Apple Grand Rose Clear Bay Lake").split()
BRAND_ENDS = "line core wave point light tech works land".split()
VENUE_ADJECTIVES = ("Golden Blue Crooked Hungry Quiet Royal Lucky Rusty Velvet Wandering Painted "
                    "Old Merry Humble Jolly Laughing Crimson Emerald Dusty Flying Sleepy Wooden "
                    "Brave Hidden Twisted").split()
VENUE_NOUNS = ("Fox Kettle Anchor Lantern Oak Spoon Bear Rose Crown Garden Harbour Mill Plough "
               "Swan Table Barrel Goose Wheel Bridge Stag Parrot Orchard Tavern Corner "
               "Hare").split()
TITLE_ADJECTIVES = ("Silent Broken Distant Endless Burning Secret Frozen Last First Bright Dark "
                    "Lonely Wild Gentle Bitter Ancient Perfect Shining Restless Fading").split()
TITLE_NOUNS = ("River Promise Winter Horizon Letter Journey Mirror Shadow Empire Voyage Island "
               "Summer Dream Memory Storm Kingdom Road Stranger Song Planet Forest Signal").split()

QUALIFIERS = ("city local annual regional northern southern public private junior senior summer "
              "winter modern classic national coastal central active monthly weekly daily special "
              "official global open small major rural urban student family famous").split()

# What a table is about: its nouns, then name=kind for text columns, then number columns.
THEMES = tuple(tuple(field.split() for field in theme) for theme in (
    ("books loans magazines libraries novels editions",
     "title=title author=person genre=genre publisher=brand language=language branch=place",
     "pages copies release_year price rating chapters"),
    ("matches players teams stadiums tournaments seasons",
     "player=person home_city=place coach=person position=position sponsor=brand country=country",
     "goals points attendance wins losses season_year"),
    ("orders products shops suppliers customers invoices",
     "customer=person product=product brand=brand colour=colour city=place status=status",
     "price quantity stock discount weight order_year"),
    ("courses students teachers classrooms lessons exams",
     "teacher=person subject=subject campus=place day=day level=level language=language",
     "credits seats grade hours start_year fee"),
    ("flights trains hotels airports ferries tours",
     "origin=place destination=place operator=brand guide=person weekday=day status=status",
     "distance duration passengers fare platform rooms"),
    ("films actors directors cinemas festivals shows",
     "film_title=title director=person studio=brand genre=genre country=country location=place",
     "budget runtime audience awards opening_year score"),
    ("patients doctors clinics visits wards medicines",
     "doctor=person patient=person hospital_city=place speciality=speciality month=month",
     "age beds dose visit_count cost room_number"),
    ("farms crops animals markets harvests fields",
     "farmer=person crop=crop village=place animal=animal month=month buyer=brand",
     "area yield_total rainfall workers profit tractors"),
    ("employees offices projects departments contracts meetings",
     "manager=person department=department office=place project=title client=brand status=status",
     "salary budget headcount bonus hire_year deadline_days"),
    ("songs albums concerts singers bands instruments",
     "singer=person album=title label=brand instrument=instrument venue_city=place genre=genre",
     "length track_count listeners tickets_sold chart_rank release_year"),
    ("museums bridges towers parks castles statues",
     "architect=person town=place material=material style=style opening_month=month",
     "height visitors width floors built_year entry_fee"),
    ("cars engines drivers races garages trucks",
     "driver=person model=product maker=brand colour=colour circuit=place fuel=fuel",
     "horsepower top_speed laps mileage cylinders model_year"),
))

KINDS = {kind: words.split() for kind, words in {
    "genre": "drama comedy mystery fantasy history romance thriller poetry science horror crime",
    "language": "English French German Spanish Italian Dutch Polish Greek Turkish Danish Hindi",
    "position": "goalkeeper defender midfielder striker captain winger reserve forward",
    "country": "France Norway Brazil Japan Kenya Canada Egypt India Chile Spain Ireland Peru",
    "colour": "red blue green black white silver grey yellow orange purple brown pink",
    "status": "active closed pending cancelled approved delayed complete rejected waiting paid",
    "subject": "biology chemistry physics algebra geography economics law music statistics logic",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "level": "beginner basic intermediate advanced expert",
    "month": "January February March April May June July August September "
             "October November December",
    "speciality": "surgery cardiology paediatrics radiology oncology dentistry neurology",
    "crop": "wheat barley maize rice potatoes apples cotton grapes onions beans carrots oats",
    "animal": "sheep cattle goats horses chickens ducks pigs bees turkeys",
    "department": "sales finance marketing research legal design support training shipping",
    "instrument": "piano violin guitar drums flute trumpet cello saxophone harp clarinet",
    "material": "brick steel granite timber marble concrete glass iron sandstone",
    "style": "gothic baroque roman modernist victorian rustic classical",
    "fuel": "petrol diesel electric hybrid hydrogen gas",
}.items()}

# Words of more than one part, or met only in talk and descriptions.
LISTS = {name: tuple(text.split(", ")) for name, text in {
    "item": "laptop, bicycle, camera, umbrella, guitar, suitcase, ladder, tent, phone, wallet, "
            "jacket, drill, printer, watch, backpack, scarf, notebook, lamp, violin, helmet, "
            "passport, ring, tablet, keyboard",
    "pet": "dog, cat, parrot, rabbit, hamster, pony, goldfish, turtle",
    "guest": "parents, neighbours, cousins, children, boss, sister, brother, grandmother, uncle, "
             "flatmate",
    "room": "kitchen, bedroom, garage, office, living room, balcony, hallway, garden shed",
    "subject": "statistics, history, biology, economics, grammar, chemistry, geometry, marketing, "
               "accounting, programming, physics, music theory, astronomy, tax law, geography, "
               "logic",
    "chore": "visit the dentist, finish a report, clean the flat, take an exam, work late, pick "
             "up the children, catch an early train, prepare a speech, go to a wedding, wait for "
             "the plumber, renew a passport, practise for a concert, attend a meeting, fix the "
             "roof, walk the dog, write an essay, see the bank manager, babysit a nephew, paint "
             "the fence, pack for a trip",
    "event": "a jazz concert, the film festival, a birthday party, a chess tournament, the book "
             "fair, an art exhibition, a cooking class, the street market, a football match, a "
             "poetry evening, the flower show, a dance class, the opera, a wine tasting, a "
             "charity run, a comedy night, the science fair, a picnic, a housewarming party, the "
             "boat race",
    "thing": "a table for two, a table for six, a double room, a single room, a haircut, a tennis "
             "court, a piano lesson, a guided tour, a meeting room, a rental car, a dental check, "
             "a massage, a swimming lesson, a taxi, a window seat, a photo session",
    "job": "a teacher, a nurse, an engineer, a chef, a gardener, a lawyer, a pilot, a designer, a "
           "librarian, an editor, a mechanic, a pharmacist, a reporter, an architect, a guide, a "
           "manager, a baker, a vet",
    "spot": "the front desk, the ticket office, the library, the lost property room, the bus "
            "station, the cafe, the gym, the school office, the police station, the bakery",
    "eat": "pub, restaurant, coffee shop, bistro, tea room, wine bar, bakery, diner",
    "food": "Italian, French, Chinese, Indian, Japanese, English, Greek, Mexican, Thai, Spanish, "
            "Turkish, Korean, vegetarian, seafood",
    "area": "riverside, city centre, old town, harbour, station, market, university, park",
    "scale": "low, average, high, 1 out of 5, 3 out of 5, 4 out of 5, 5 out of 5",
    "range": "cheap, moderate, high, less than £20, £20-25, more than £30",
    "device": "laptop, kettle, vacuum cleaner, headphone set, desk lamp, running shoe, coffee "
              "machine, phone, camera, backpack, monitor, bicycle, washing machine, toaster, "
              "tent, electric shaver, microwave, speaker",
    "feature": "a touch screen, a long battery life, a quiet motor, a leather strap, a steel "
               "frame, a solar panel, a built-in timer, a wireless charger, a folding handle, a "
               "noise filter, a remote control, a waterproof cover, a bright display, a heavy "
               "base, a child lock, an energy label",
    "use": "students, travellers, small kitchens, large families, office work, beginners, "
           "professionals, outdoor trips, gamers, musicians, gifts, older people",
    "show": "concert, lecture, reading, play, workshop, dance show, magic show, film night, "
            "debate, recital",
}.items()}
TIMES = tuple(f"{hour}:{minute} {half}"
              for half, hours in (("am", range(8, 12)), ("pm", range(1, 10))) for hour in hours
              for minute in ("00", "15", "30", "45"))


def article(noun):
    """The noun with "a" or "an" in front."""
    return ("an " if noun[0] in "AEIOUaeiou" else "a ") + noun


def names(kind, split):
    """All names of one kind and split.

    kind: "first", "person", "surname", "place", "brand", "product", "venue" or "title".
    Raises ValueError for any other.
    """
    makers = {
        "first": lambda: pairs(FIRST_STARTS, FIRST_ENDS, split),
        "surname": lambda: pairs(SURNAME_STARTS, SURNAME_ENDS, split),
        "place": lambda: pairs(PLACE_STARTS, PLACE_ENDS, split),
        "brand": lambda: pairs(BRAND_STARTS, BRAND_ENDS, split),
        "product": lambda: [f"{brand} {model}" for i, brand in enumerate(names("brand", split))
                            for model in ("X", "Mini", "Plus", "Pro", "S", "Max")[i % 3::3]],
        "venue": lambda: (pairs(VENUE_ADJECTIVES, VENUE_NOUNS, split, "The {} {}")
                          + pairs(SURNAME_STARTS, SURNAME_ENDS, split, "{}{}'s")[::3]),
        "title": lambda: pairs(TITLE_ADJECTIVES, TITLE_NOUNS, split, "{} {}"),
        "person": lambda: [f"{first} {last}" for i, first in enumerate(names("first", split))
                           for last in names("surname", split)[i % 7::7]],
    }
    if kind not in makers:
        raise ValueError(f"unknown kind of name {kind!r}: expected one of {', '.join(makers)}")
    return makers[kind]()


def tables(theme, split):
    """Names of tables about THEMES[theme], as (name, what its rows are called) pairs."""
    nouns = THEMES[theme][0]
    return [(name, name.split("_", 1)[1]) for name in pairs(QUALIFIERS, nouns, split, "{}_{}")]
