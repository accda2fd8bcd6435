"""Task "dialogue": a short talk between two people -> who wanted what, and how it ended.

The idea: a summary is one set phrase for the scene and one for its outcome ("asked whether ...
could", "refused because ... had to"), filled with names, days and places said several turns ago.
Other people, days and prices that are mentioned but don't matter are distractors.

Read first: words.py. Read next: tasks.py.
Proven by: tests/test_tasks.py.
"""

from minispec import words
from minispec.words import FREE, TIMES, article

# What occurs in prompts only; each sixth template is held out.
TEMPLATES = {
    "greet": ("Hi {B}, do you have a minute?", "Hello {B}, how are you?", "Good morning, {B}.",
              "Hey {B}, can we talk?", "{B}, I am glad I found you.",
              "Oh, {B}, there you are at last.", "Hi {B}, are you busy right now?",
              "Good afternoon, {B}.", "Hello {B}, long time no see.", "Excuse me, {B}.",
              "Hi {B}, may I ask you something?", "{B}! Just the one I was hoping to meet."),
    "greeted": ("Hi {A}. Of course, what is it?", "Hello {A}, nice to see you.",
                "Hi {A}, go ahead.", "Fine, thanks {A}. What is going on?",
                "Hello {A}. How can I help you?", "Well, {A}, what a pleasant surprise.",
                "Sure {A}, what is on your mind?", "Oh, hi {A}. Tell me.", "Yes, {A}?",
                "Hey {A}, what is new?", "Good to see you, {A}.",
                "Always happy to listen to you, {A}."),
    "ask": ("Could you {do}?", "Would you be able to {do}?", "I was wondering if you could {do}.",
            "Do you think you could {do}?", "Can I ask you to {do}?",
            "It would be wonderful of you to {do}.", "I need someone to {do}. Can you?",
            "Would you mind? I need you to {do}.", "Please, could you {do}?",
            "Is there any chance that you could {do}?", "I hope you can {do}.",
            "You would save my week if you were to {do}."),
    "aside": ("I asked {C} already, but {C} is away until {day3}.", "{C} told me you might help.",
              "{C} wanted to do it on {day3}, but that fell through.",
              "I know {C} usually does this.", "Last time {C} took care of it.",
              "It was {C} who gave me your name, back in {place2}.",
              "{C} said you were free after {time3}.", "No, {C} is in {place2} all week.",
              "{C} has no time before {day3}.", "I called {C} at {time3}, but nobody answered.",
              "{C} has to work until {time3}.", "Not even {C}, who left for {place2} on {day3}."),
    "yes": ("Sure, no problem. I will be ready at {time}.", "Of course. Let us say {time}.",
            "Happy to help. Is {time} all right?", "Yes, I can do that at {time}.",
            "No problem at all. {time} works for me.", "By all means, count me in at {time}.",
            "With pleasure. I am free from {time}.", "All right, at {time} then.",
            "Yes, gladly. Shall we say {time}?", "Why not? I have time at {time}.",
            "Okay, I can be there at {time}.", "Naturally! Expect me around {time}."),
    "no": ("Sorry, I can not. I have to {chore}.", "I am afraid not, I must {chore}.",
           "I would love to, but I need to {chore}.", "Not this time. I promised to {chore}.",
           "Unfortunately I am going to {chore}.",
           "That is impossible for me: I still have to {chore}.",
           "I wish I could, but I have to {chore}.", "No, I really have to {chore}.",
           "Sorry, but they want me to {chore}.", "I can not, because I need to {chore}.",
           "Bad timing. I have to {chore}.", "Alas, what I have to do instead is {chore}."),
    "shift": ("{day} is difficult for me. How about {day2}?",
              "Can we make it {day2} instead of {day}?", "I am busy on {day}, but {day2} is fine.",
              "{day} does not work, {day2} would be better.",
              "Not on {day}. Let us do it on {day2}.", "My {day} is packed, so maybe {day2}?"),
    "refer": ("I can not do it, but {D} could.", "You should ask {D}, not me.",
              "Try {D}, who is better at it.", "I have no time, but {D} is free.",
              "Sorry, that is a job for {D}.", "Perhaps {D} is the right person here."),
    "thanks": ("Thank you so much, {B}.", "Great, thanks {B}!", "Thanks, {B}.",
               "I see. Thank you, {B}.", "Perfect, that helps.", "Much obliged to you, {B}.",
               "Wonderful, {B}.", "Thanks a lot, I owe you one.", "You are the best, {B}.",
               "That is very kind of you.", "Good, I am glad I asked.",
               "What would I do without {B}!"),
    "alas": ("All right, thanks anyway.", "I see, {B}. Never mind.", "That is a pity.",
             "Fine, I understand.", "Okay, maybe next time.", "Too bad, but it can not be helped."),
    "bye": ("You are welcome, {A}.", "See you soon, {A}.", "Good luck, {A}.", "Any time.",
            "Bye, {A}. Take care.", "Farewell for now, {A}.", "No worries, {A}.",
            "Have a nice day, {A}.", "See you, {A}.", "All the best, {A}.", "Talk to you later.",
            "Until we meet again, {A}."),
    "invite": ("Would you like to come to {event} in {place} on {day}?",
               "Do you want to join me at {event} in {place} this {day}?",
               "I have two tickets for {event} in {place} on {day}. Are you coming?",
               "We are going to {event} in {place} on {day}. Will you come along?",
               "Are you free on {day}? There is {event} in {place}.",
               "How do you feel about {event} over in {place} next {day}?"),
    "book": ("I would like to book {thing} for {day} at {time}.",
             "Can I reserve {thing} on {day} at {time}?",
             "Do you have {thing} free on {day} at {time}?",
             "I need {thing} for {day}, at {time} if possible.",
             "Please put me down for {thing} on {day} at {time}.",
             "I hope to get {thing} this coming {day} around {time}."),
    "booked": ("That is possible. It costs {price}.", "Yes, we have that for {price}.",
               "Certainly, the price is {price}.", "Done. You pay {price} on arrival.",
               "That will be {price}, please.", "It is yours for {price} in total."),
    "full": ("We are full at {time}, but {time2} is free.", "Sorry, only {time2} is left.",
             "I can offer you {time2} instead.", "{time} is taken. Would {time2} do?",
             "There is nothing before {time2}.", "The closest I can give you is {time2}."),
    "news": ("I am going to work as {job} in {place}.",
             "I got the job! I will be {job} in {place}.",
             "I am moving to {place} to become {job}.", "They hired me as {job} in {place}.",
             "My new work is in {place}, as {job}.",
             "You will not believe it: {job}, me, in {place}!"),
    "when": ("When do you start, and what about {C}?", "Great! When do you begin?",
             "Wow, when is your first day?", "Really? How soon will you start?",
             "That is good news. When do you leave?", "Marvellous! And the starting date?"),
    "start": ("I start in {month}. {C} stays here until {month2}.",
              "In {month}, not in {month2} as planned.", "My first day is in {month}.",
              "They want me in {month}.", "It begins in {month}.",
              "I am expected there by {month}."),
    "problem": ("I {trouble} lately.", "I have a problem: I {trouble}.",
                "To be honest, I {trouble}.", "Things are bad. I {trouble}.",
                "I am worried because I {trouble}.", "Something is wrong with me, I {trouble}."),
    "advice": ("You should {advice}.", "Why do you not {advice}?", "Maybe you could {advice}.",
               "If I were you, I would {advice}.", "Have you tried this: {advice}?",
               "The best cure I know is to {advice}."),
    "doubt": ("I am not sure. {C} told me to {advice2}.", "Hm, {C} said I should {advice2}.",
              "I would rather {advice2}.", "Is it not better to {advice2}?",
              "My doctor wants me to {advice2}.", "Others keep telling me to {advice2}."),
    "lost": ("I lost my {item} in {place}.", "I left my {item} on the bus to {place}.",
             "I can not find my {item}. I had it in {place}.",
             "My {item} is gone since I was in {place}.", "Somebody took my {item} in {place}.",
             "My {item} went missing somewhere around {place}."),
    "look": ("What colour is it?", "What does it look like?", "Can you describe it?",
             "Tell me more about it.", "Is it the one from {C}?", "How would I recognise it?"),
    "looks": ("It is {colour}, with a sticker from {place2}.", "It is {colour}. {C} gave it to me.",
              "It is quite old and {colour}.", "The {colour} one that cost me {price}.",
              "It is {colour} and rather small.", "Mostly {colour}, I would say."),
    "found": ("Good news, we found it. It is at {spot}.", "It was handed in at {spot}.",
              "Somebody left it at {spot}.", "You can pick it up at {spot}.", "I saw it at {spot}.",
              "You are in luck, have a look at {spot}."),
    "unfound": ("Nobody has found it. I will call you on {day}.",
                "Not yet. I will ring you on {day}.", "No sign of it. I will call on {day}.",
                "We do not have it. You will hear from me on {day}.",
                "I will search for it and call you on {day}.",
                "No luck so far, so expect my call on {day}."),
}

# What one asks for: as said ("Could you ...") and as told ("asked whether B could ...").
REQUESTS = tuple(tuple(line.split(" | ")) for line in """
lend me your {item} until {day} | lend the {item} until {day}
give me a lift to {place} on {day} | give {A} a lift to {place} on {day}
look after my {pet} on {day} | look after the {pet} on {day}
help me move to {place} on {day} | help with the move to {place} on {day}
repair my {item} by {day} | repair the {item} by {day}
pick up my {item} in {place} on {day} | pick up the {item} in {place} on {day}
check my report about {subject} before {day} | check a report about {subject} before {day}
explain {subject} to me on {day} | explain {subject} on {day}
swap shifts with me on {day} | swap shifts on {day}
cook dinner for my {guest} on {day} | cook dinner for the {guest} on {day}
drive my {guest} to the airport on {day} | drive the {guest} to the airport on {day}
meet me on {day} to talk about {subject} | meet on {day} to talk about {subject}
sell me your old {item} on {day} | sell the old {item} on {day}
send the {subject} notes to me by {day} | send the {subject} notes by {day}
paint my {room} on {day} | help paint the {room} on {day}
water the plants in my {room} on {day} | water the plants in the {room} on {day}
teach me some {subject} by {day} | teach some {subject} by {day}
carry my {item} to {place} on {day} | carry the {item} to {place} on {day}
show my {guest} around {place} on {day} | show the {guest} around {place} on {day}
take my {pet} to the vet on {day} | take the {pet} to the vet on {day}
bring your {item} to {place} on {day} | bring the {item} to {place} on {day}
clean the {room} with me on {day} | clean the {room} on {day}
order a new {item} for me before {day} | order a new {item} before {day}
speak to my {guest} on {day} | speak to the {guest} on {day}
""".strip().splitlines())

# A trouble as said ("I ...") and as told ("complained of ..."), then advice for it.
TROUBLES = (
    ("can not sleep", "not sleeping well",
     ("drink less coffee", "go to bed earlier", "read a book at night", "buy a better pillow")),
    ("feel tired all day", "feeling tired all day",
     ("take a long holiday", "eat more fruit", "see a doctor", "walk every morning")),
    ("spend too much money", "spending too much money",
     ("keep a list of expenses", "cook at home", "cancel the gym", "sell the car")),
    ("can not learn {subject}", "having trouble with {subject}",
     ("find a good tutor", "study with friends", "watch online lessons")),
    ("argue with my {guest} every day", "arguing with the {guest}",
     ("talk it over calmly", "say sorry first", "spend a day apart")),
    ("have a terrible headache", "a terrible headache",
     ("drink some water", "lie down for an hour", "turn off the screen")),
    ("hate my job in {place}", "a bad job in {place}",
     ("look for a new job", "speak to the manager", "ask for more pay")),
    ("feel lonely in {place}", "feeling lonely in {place}",
     ("join a sports club", "call old friends", "adopt a dog", "take a dance class")),
    ("can not find a flat in {place}", "finding no flat in {place}",
     ("share a house", "ask an agent", "search further out")),
    ("am always late for work", "always being late for work",
     ("set two alarms", "take the early train", "move closer to work")))
SLOT_KINDS = ("item", "pet", "guest", "room", "subject", "chore", "event", "thing", "job", "spot")
OPENING = ["greet", "greeted"]


def make(draw):
    """(prompt, completion); the two speak in turn. A turn is a key of TEMPLATES or plain text."""
    names = draw.some(draw.pool("first"), 4)
    slots = dict(zip("ABCD", names))
    for key, kind in (("day", "day"), ("month", "month")):
        slots[key], slots[key + "2"], slots[key + "3"] = draw.some(words.KINDS[kind], 3)
    slots["time"], slots["time2"], slots["time3"] = draw.some(TIMES, 3)
    slots["place"], slots["place2"] = draw.some(draw.pool("place"), 2)
    slots["price"] = f"${5 * (1 + int(draw.rng.random() * 80))}"
    slots["colour"] = draw.pick(words.KINDS["colour"])
    slots["coloured"] = article(slots["colour"])
    slots.update((kind, draw.word(kind)) for kind in SLOT_KINDS)
    scene = draw.pick((request, request, request, invitation, booking, news, advice, lost))
    turns, summary = scene(draw, slots)
    lines = [f"{names[i % 2]}: {draw.line(turn, **slots) if turn in TEMPLATES else turn}"
             for i, turn in enumerate(turns)]
    return "\n".join(lines) + "\nSummary:\n", summary.format(**slots)


def answer(draw, slots, agreed, referral=True):
    """What B replies: the turns, and the end of the summary."""
    kind = draw.pick(("yes", "no", "shift", "refer") if referral else ("yes", "no", "shift"))
    told = {
        "yes": f" {{B}} {agreed} and will be ready at {{time}}.",
        "no": " {B} refused because {B} had to {chore}.",
        "shift": " {B} was busy on {day} and suggested {day2} instead, which {A} accepted.",
        "refer": " {B} had no time and told {A} to ask {D} for help.",
    }[kind]
    if kind == "shift":
        return ["shift", f"Okay, {slots['day2']} it is."], told
    return [kind, "alas" if kind == "no" else "thanks"], told


def request(draw, slots):
    do, told = draw.pick(REQUESTS)
    slots["do"] = do.format(**slots)
    replies, end = answer(draw, slots, "agreed to help")
    turns = [*OPENING, "ask"] if draw.chance(0.6) else ["ask"]
    if draw.chance(0.5):
        turns += ["Is nobody else free?", "aside"]
    verb = "wondered" if draw.chance(FREE) else "asked"
    start = f"{{A}} {verb} whether {{B}} could "
    return turns + replies + ["bye"] * draw.chance(0.5), start + told + "." + end


def invitation(draw, slots):
    replies, end = answer(draw, slots, "was happy to come", referral=False)
    turns = [*OPENING, "invite"] if draw.chance(0.6) else ["invite"]
    if draw.chance(0.5):
        turns += ["Who else will be there?",
                  f"{slots['C']} and some friends from {slots['place2']}."]
    start = "{A} invited {B} to {event} in {place} on {day}."
    if draw.chance(FREE):
        start = "{A} wanted {B} to come to {event} in {place} on {day}."
    return turns + replies, start + end


def booking(draw, slots):
    turns = [*OPENING, "book"] if draw.chance(0.5) else ["book"]
    start = "{A} wanted to book {thing} for {day} at {time}."
    if draw.chance(0.5):
        return (turns + ["booked", "thanks", "bye"],
                start + " {B} confirmed the booking at a price of {price}.")
    turns += ["full", f"Fine, {slots['time2']} then. How much is it?", "booked"]
    return turns, start + " Only {time2} was free, so {A} took it for {price}."


def news(draw, slots):
    turns = [*OPENING, "news"] if draw.chance(0.7) else ["news"]
    start = "{A} told {B} about a new job as {job} in {place}, starting in {month}."
    turns += ["when", "start"]
    if draw.chance(0.5):
        turns += [f"Let us celebrate on {slots['day']} at {slots['time']}.", "thanks"]
        return turns, start + " {B} suggested that they celebrate on {day} at {time}."
    turns += ["Congratulations! I will miss you.", "thanks"]
    return turns, start + " {B} congratulated {A} on the news."


def advice(draw, slots):
    trouble, told, cures = draw.pick(TROUBLES)
    first, second = draw.some(cures, 2)
    slots.update(trouble=trouble.format(**slots), advice=first, advice2=second)
    turns = [*OPENING, "problem"] if draw.chance(0.6) else ["problem"]
    start = "{A} complained about " + told + ". {B} advised {A} to {advice}"
    if draw.chance(0.5):
        return (turns + ["advice", "doubt", "Trust me, it works."],
                start + ", but {A} was not convinced and thought it better to {advice2}.")
    return (turns + ["advice", "Good idea, I will do that.", "bye"],
            start + ", and {A} liked the idea.")


def lost(draw, slots):
    turns = [*OPENING, "lost"] if draw.chance(0.4) else ["lost"]
    turns += ["look", "looks"]
    start = "{A} was looking for {coloured} {item} that was lost in {place}."
    if draw.chance(0.5):
        return turns + ["found", "thanks"], start + " {B} told {A} to pick it up at {spot}."
    return (turns + ["unfound", "alas"],
            start + " {B} had not found it yet and promised to call {A} on {day}.")
