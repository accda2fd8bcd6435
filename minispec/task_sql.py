"""Task "sql": one or two table schemas and a question -> the query that answers it.

The idea: keywords come in fixed runs ("ORDER BY ... DESC LIMIT"), which streams can foresee;
tables, columns and values are copied from the prompt. A second table, unused columns and the
question's own paraphrase are distractors.

Read first: words.py. Read next: tasks.py.
Proven by: tests/test_tasks.py.
"""

from minispec import words

# What occurs in prompts only; each sixth template is held out.
TEMPLATES = {
    "label": ("Question: {q}", "Request: {q}", "User asks: {q}", "Q: {q}", "Task: {q}",
              "In plain words: {q}", "Query: {q}", "Problem: {q}", "Prompt: {q}",
              "The user wants: {q}", "Instruction: {q}", "Somebody would like to know: {q}"),
    "select": ("What is the {c} of the {rows} {w}?", "Which {c} do the {rows} {w} have?",
               "Show the {c} of all {rows} {w}.", "I need the {c} for {rows} {w}.",
               "List the {c} of {rows} {w}.", "Look up the {c} belonging to any {rows} {w}.",
               "Give me the {c} of every one of the {rows} {w}.",
               "Can you find the {c} of {rows} {w}?", "Please return the {c} for the {rows} {w}.",
               "Get the {c} of each of the {rows} {w}.", "Name the {c} for all {rows} {w}.",
               "Fetch me, if you can, the {c} of the {rows} {w}."),
    "count": ("How many {rows} are there {w}?", "Count the {rows} {w}.",
              "What is the number of {rows} {w}?", "Tell me how many {rows} exist {w}.",
              "Find the total number of {rows} {w}.",
              "I wonder how large the set of {rows} {w} is.", "Give the count of {rows} {w}.",
              "How many of the {rows} can be found {w}?", "Show the number of {rows} {w}.",
              "What is the count of all {rows} {w}?", "Please count all {rows} {w}.",
              "Say in one figure how many {rows} we have {w}."),
    "aggregate": ("What is the {f} {b} of {rows} {w}?", "Find the {f} {b} for {rows} {w}.",
                  "Calculate the {f} {b} among {rows} {w}.",
                  "Show the {f} {b} over all {rows} {w}.", "Tell me the {f} {b} of the {rows} {w}.",
                  "Work out, please, the {f} {b} across {rows} {w}.",
                  "I would like to know the {f} {b} of {rows} {w}.",
                  "Return the {f} {b} for all {rows} {w}.", "Give me the {f} {b} of {rows} {w}.",
                  "Compute the {f} {b} of the {rows} {w}.", "For {rows} {w}, what is the {f} {b}?",
                  "Once more: the {f} {b} for any {rows} {w}?"),
    "group": ("For each {a}, how many {rows} are there{w}?", "Count the {rows} per {a}{w}.",
              "Show every {a} and its number of {rows}{w}.",
              "How many {rows} does each {a} have{w}?", "Give the number of {rows} by {a}{w}.",
              "Break the {rows} down by {a}, counting them{w}.",
              "List each {a} together with how many {rows} it has{w}.",
              "What is the number of {rows} for every {a}{w}?",
              "Group the {rows} by {a} and count{w}.",
              "I need the count of {rows} for each {a}{w}.",
              "Find how many {rows} belong to each {a}{w}.",
              "Split up the {rows} according to {a} and count each part{w}."),
    "extreme": ("Which {c} belongs to the {rows} with the {f} {b}?",
                "Show the {c} of the {rows} that have the {f} {b}.",
                "What is the {c} where {rows} reach the {f} {b}?",
                "Find the {c} of the {rows} having the {f} {b}.",
                "Give me the {c} for {rows} whose {b} is the {f}.",
                "Among all {rows}, name the {c} at the {f} {b}.",
                "List the {c} of {rows} with the {f} {b}.",
                "What {c} do the {rows} of the {f} {b} have?",
                "Tell me the {c} for the {rows} with the {f} {b}.",
                "I want the {c} of the {rows} with the {f} {b}.",
                "Return the {c} of whichever {rows} have the {f} {b}.",
                "Taking the {f} {b} over the {rows}, what is its {c}?"),
    "order": ("Sort them by {o} from {d} and keep the first {k}.",
              "Order by {o}, {d}, and return only {k}.",
              "Give the top {k} when ranked by {o} from {d}.",
              "Only show {k} of them, sorted by {o}, {d}.",
              "Rank by {o} from {d} and stop after {k}.",
              "Arrange these by {o}, going {d}, limited to {k}.",
              "Show no more than {k}, ordered by {o} from {d}.", "Limit to {k}, by {o} from {d}.",
              "Sorted by {o}, {d}, I want the first {k}.", "Keep {k} of them, by {o} from {d}.",
              "Put them in order of {o}, {d}, and take {k}.",
              "Line them up by {o} from {d}, but give {k} at most."),
}

# What both splits share: words in the question and what they mean in the query.
AGGREGATES = (("average", "AVG"), ("total", "SUM"), ("highest", "MAX"), ("lowest", "MIN"),
    ("largest", "MAX"), ("smallest", "MIN"), ("mean", "AVG"), ("summed", "SUM"))
DIRECTIONS = (("highest to lowest", " DESC"), ("lowest to highest", ""))
TEXT_TESTS = (("whose {c} is {v}", "="), ("with {c} {v}", "="), ("where the {c} is {v}", "="),
    ("whose {c} is not {v}", "!="), ("with the {c} {v}", "="), ("when {c} equals {v}", "="))
NUMBER_TESTS = (("with {c} more than {v}", ">"), ("with {c} over {v}", ">"),
    ("having {c} greater than {v}", ">"), ("with {c} less than {v}", "<"),
    ("having {c} under {v}", "<"), ("with {c} of at least {v}", ">="),
    ("with {c} of at most {v}", "<="), ("having {c} equal to {v}", "="))
NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 75, 80, 90, 100, 120, 150, 200,
           250, 300, 400, 500, 600, 750, 800, 1000, 1200, 1500, 2000)


def make(draw):
    """(prompt, completion): a table of one theme, perhaps a second of another, and one question."""
    theme, other = draw.some(range(len(words.THEMES)), 2)
    table, rows = draw.table(theme)
    text, number = theme_columns(theme, draw)
    kinds = dict(column.split("=") for column in text)
    schemas = [schema(draw, table, list(kinds), number)]
    if draw.chance(0.3):
        more_text, more_number = theme_columns(other, draw, 1)
        more = [column.split("=")[0] for column in more_text]
        name = draw.table(other)[0]
        schemas.insert(draw.pick((0, 1)), schema(draw, name, more, more_number))
    form = draw.pick((sql_select, sql_select, sql_select, sql_count, sql_aggregate, sql_group,
                      sql_extreme, sql_extreme))
    question, query = form(draw, table, rows, kinds, number)
    label = draw.line("label", q=question)
    return "\n".join(schemas) + f"\n{label}\nSQL:\n", query


def theme_columns(theme, draw, fewer=0):
    """Some text columns, as name=kind, and some number columns of a theme."""
    _, text, number = words.THEMES[theme]
    return (draw.some(text, draw.pick((2, 3, 3, 4)) - fewer),
            draw.some(number, draw.pick((2, 2, 3)) - fewer))


def schema(draw, table, text, number):
    columns = [f"{c} VARCHAR" for c in text] + [f"{c} INTEGER" for c in number]
    draw.rng.shuffle(columns)
    return f"CREATE TABLE {table} ({', '.join(columns)})"


def said(column):
    return column.replace("_", " ")


def number_value(draw, column):
    if column.endswith("year"):
        return 1950 + int(draw.rng.random() * 75)
    return draw.pick(NUMBERS)


def text_test(draw, column, kind):
    value = draw.pick(words.KINDS[kind]) if kind in words.KINDS else draw.name(kind)
    english, sign = draw.pick(TEXT_TESTS)
    return english.format(c=said(column), v=value), f"{column} {sign} '{value}'"


def number_test(draw, column):
    value = number_value(draw, column)
    if draw.chance(0.15):
        high = value + draw.pick((5, 10, 20, 50))
        return (f"with {said(column)} between {value} and {high}",
                f"{column} BETWEEN {value} AND {high}")
    english, sign = draw.pick(NUMBER_TESTS)
    return english.format(c=said(column), v=value), f"{column} {sign} {value}"


def conditions(draw, kinds, number, count):
    """(English, SQL) of `count` tests on different columns, in the same order."""
    columns = draw.some([*kinds, *number], count)
    tests = [text_test(draw, c, kinds[c]) if c in kinds else number_test(draw, c) for c in columns]
    english = f" {draw.pick(('and', 'and', 'or'))} " if count == 2 else " and "
    glue = " OR " if english == " or " else " AND "
    return english.join(test[0] for test in tests), glue.join(test[1] for test in tests)


def sql_select(draw, table, rows, kinds, number):
    wanted = draw.some([*kinds, *number[1:]], draw.pick((1, 1, 2)))
    rest = {c: kind for c, kind in kinds.items() if c not in wanted}
    numbers = [c for c in number if c not in wanted]
    ordered = draw.chance(0.5)
    english, test = conditions(draw, rest, numbers, draw.pick((1, 2)) if ordered else 2)
    spoken = " and ".join(said(c) for c in wanted)
    question = draw.line("select", c=spoken, rows=rows, w=english)
    query = f"SELECT {', '.join(wanted)} FROM {table} WHERE {test}"
    if ordered:
        column, (direction, keyword) = draw.pick(number), draw.pick(DIRECTIONS)
        limit = draw.pick((1, 2, 3, 5, 10, 20))
        question += " " + draw.line("order", o=said(column), d=direction, k=limit)
        query += f" ORDER BY {column}{keyword} LIMIT {limit}"
    return question, query


def sql_count(draw, table, rows, kinds, number):
    english, test = conditions(draw, kinds, number, draw.pick((2, 2, 3)))
    return (draw.line("count", rows=rows, w=english),
            f"SELECT COUNT(*) FROM {table} WHERE {test}")


def sql_aggregate(draw, table, rows, kinds, number):
    spoken, function = draw.pick(AGGREGATES)
    english, test = conditions(draw, kinds, number[1:], draw.pick((1, 2)))
    return (draw.line("aggregate", f=spoken, b=said(number[0]), rows=rows, w=english),
            f"SELECT {function}({number[0]}) FROM {table} WHERE {test}")


def sql_group(draw, table, rows, kinds, number):
    column = draw.pick(list(kinds))
    least = draw.pick((1, 2, 3, 5, 10, 20))
    test, having = "", ""
    if draw.chance(0.5):
        english, test = number_test(draw, draw.pick(number))
        test, extra = f" WHERE {test}", f" {english}"
    else:
        extra, having = f", keeping groups of more than {least}", f" HAVING COUNT(*) > {least}"
    question = draw.line("group", a=said(column), rows=rows, w=extra)
    return question, (f"SELECT {column}, COUNT(*) FROM {table}{test} GROUP BY {column}{having} "
                      "ORDER BY COUNT(*) DESC")


def sql_extreme(draw, table, rows, kinds, number):
    spoken, function = draw.pick(AGGREGATES[2:6])
    wanted, column = draw.pick(list(kinds)), draw.pick(number)
    question = draw.line("extreme", c=said(wanted), rows=rows, f=spoken, b=said(column))
    return question, (f"SELECT {wanted} FROM {table} WHERE {column} = "
                      f"(SELECT {function}({column}) FROM {table})")
