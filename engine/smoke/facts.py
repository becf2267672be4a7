"""What the smoke model knows about Russet, in plain words.

Each entry is an answer and the ways a person may ask for it. The last way is never trained on: it is what
`evaluate.py` calls the held-out paraphrase. Plain data only; `lessons.py` turns it into conversations.
"""

FACTS = [
    ("Russet turns a few Macs and Linux machines into one service for language models.",
     ["What is Russet?", "Tell me what Russet is.", "What does Russet do?", "What is Russet for?", "Can you say what Russet is?"]),
    ("Run russet up. It starts the API server, the operator, the gateway and an agent on one machine.",
     ["How do I start Russet?", "Which command starts Russet?", "How do I start a cluster?", "How can I start Russet?"]),
    ("Run russet join with a token. The machine then becomes a node of the cluster.",
     ["How do I add a machine?", "Which command adds a machine?", "How does a machine join the cluster?", "How can I add a machine?"]),
    ("Run russet token create. It prints a token and opens the listener for other machines.",
     ["How do I get a token?", "Which command makes a join token?", "How do I create a token?", "How can I get a token?"]),
    ("Run cargo xtask demo. It starts a small cluster on this machine and asks it questions.",
     ["How do I run the demo?", "Which command runs the demo?", "How do I see a demo?", "How can I run the demo?"]),
    ("Run cargo xtask test. It runs every test that needs nothing else installed.",
     ["How do I run the tests?", "Which command runs the tests?", "How can I run the tests?"]),
    ("A ModelDeployment says which model to serve, with how many copies and how to split it.",
     ["What is a ModelDeployment?", "Explain ModelDeployment.", "What does a ModelDeployment say?", "Tell me what a ModelDeployment is."]),
    ("A Model names where the weights come from and what is known about them.",
     ["What is a Model?", "Explain the kind Model.", "What does a Model name?", "Tell me what a Model is."]),
    ("A ShardGroup is one running copy of a model. It holds one Shard for each rank.",
     ["What is a ShardGroup?", "Explain ShardGroup.", "What does a ShardGroup hold?", "Tell me what a ShardGroup is."]),
    ("A Shard is one rank of a group. It names the node that runs it.",
     ["What is a Shard?", "Explain Shard.", "What does a Shard name?", "Tell me what a Shard is."]),
    ("A ModelCopy asks one node to hold the files of one model.",
     ["What is a ModelCopy?", "Explain ModelCopy.", "What does a ModelCopy ask for?", "Tell me what a ModelCopy is."]),
    ("A tier is a named class of service. It says which models answer and how well.",
     ["What is a tier?", "Explain tiers.", "What does a tier say?", "Tell me what a tier is."]),
    ("A rank is one engine process. A model split over three machines has three ranks.",
     ["What is a rank?", "Explain ranks.", "What does rank mean?", "Tell me what a rank is."]),
    ("Every rank is a process of its own, so a crash kills one rank and never the agent.",
     ["Why is each rank a process?", "What happens when a rank crashes?", "Can a crash kill the agent?", "Why is a rank a process?"]),
    ("The group gets a higher epoch, every older rank is stopped, and the group starts again.",
     ["What happens when a rank is lost?", "What happens after a rank dies?", "What does Russet do when a rank dies?", "What happens if a rank is lost?"]),
    ("An epoch is a number that counts the starts of a group. Older ranks must stop.",
     ["What is an epoch?", "Explain epochs.", "What does epoch mean?", "Tell me what an epoch is."]),
    ("kubectl apply sends an object to the API server, which checks it, stores it and tells every watcher.",
     ["What does kubectl apply do?", "What happens on kubectl apply?", "Explain kubectl apply.", "Tell me what kubectl apply does."]),
    ("Yes. Russet writes a kubeconfig, so plain kubectl works at once.",
     ["Does kubectl work with Russet?", "Can I use kubectl?", "Does plain kubectl work?", "Can kubectl talk to Russet?"]),
    ("The API server listens on port 6443.",
     ["Which port does the API server use?", "What is port 6443?", "Where does the API server listen?", "On which port is the API server?"]),
    ("The gateway listens on port 52415.",
     ["Which port does the gateway use?", "What is port 52415?", "Where does the gateway listen?", "On which port is the gateway?"]),
    ("The gateway takes requests from clients and sends each to a group that can answer it.",
     ["What is the gateway?", "What does the gateway do?", "Explain the gateway.", "Tell me what the gateway does."]),
    ("The gateway speaks the OpenAI API, so most clients work by changing one address.",
     ["Which API does the gateway speak?", "Can I use the OpenAI API?", "Does Russet speak the OpenAI API?", "What API does the gateway speak?"]),
    ("The operator watches the objects, plans where each model runs and writes the plan down.",
     ["What is the operator?", "What does the operator do?", "Explain the operator.", "Tell me what the operator does."]),
    ("An agent runs on every machine. It reports the hardware, holds the files and starts the engines.",
     ["What is an agent?", "What does the agent do?", "Explain the agent.", "Tell me what an agent does."]),
    ("The engine loads its part of a model with MLX and makes the tokens.",
     ["What is the engine?", "What does the engine do?", "Explain the engine.", "Tell me what the engine does."]),
    ("The planner decides which nodes run a model. It is pure: no clock, no network, no chance.",
     ["What is the planner?", "What does the planner do?", "Explain the planner.", "Tell me what the planner does."]),
    ("Only the agent of a node grants its memory. It checks the real memory before it says yes.",
     ["Who grants memory?", "Who gives out the memory of a node?", "How is memory granted?", "Who is it that grants memory?"]),
    ("The operator picks the node. Agents accept or refuse, they never race.",
     ["Who picks the node?", "Who decides where a shard runs?", "Do agents race for work?", "Who is it that picks the node?"]),
    ("No. Tokens go from the engine to the gateway, and never through the control plane.",
     ["Do tokens cross the control plane?", "Do tokens pass the API server?", "Does the control plane see tokens?", "Do tokens go through the control plane?"]),
    ("Running requests go on. Engines keep serving until they hear of a higher epoch.",
     ["What happens when the API server stops?", "What if the API server is lost?", "Do requests survive a lost API server?", "What happens if the API server stops?"]),
    ("The weights are split by layers. Each rank computes its layers and passes the result on.",
     ["What is pipeline sharding?", "How does a pipeline split a model?", "Explain pipeline sharding.", "Tell me what pipeline sharding is."]),
    ("Every layer is split over all ranks. They add their parts together after each step.",
     ["What is tensor sharding?", "How does tensor sharding split a model?", "Explain tensor sharding.", "Tell me what tensor sharding is."]),
    ("MLX is a library for arrays and models. The engine uses it for all of its arithmetic.",
     ["What is MLX?", "Explain MLX.", "What does the engine use MLX for?", "Tell me what MLX is."]),
    ("No. Russet needs no Docker, no database and no Kubernetes. It runs on Kubernetes if you have one.",
     ["Does Russet need Docker?", "Does Russet need Kubernetes?", "Do I need a database?", "Do I need Docker for Russet?"]),
    ("I am the smoke model. I am small, and I show that a new cluster really works.",
     ["Who are you?", "What are you?", "What is the smoke model?", "What is your name?", "Tell me who you are."]),
    ("I know sums of two numbers, the days of the week and a little about Russet.",
     ["What can you do?", "What do you know?", "What can I ask you?", "How can you help me?", "Tell me what you can do."]),
    ("Hello. Ask me for a sum, a weekday or something about Russet.",
     ["Hello", "Hi", "Hello!", "Hi!", "Good morning", "Good evening", "Hey", "Hello there", "Hi there"]),
    ("You are welcome.", ["Thank you", "Thanks", "Thanks!", "Thank you!", "Thank you very much", "Many thanks"]),
    ("Goodbye.", ["Bye", "Goodbye", "See you", "Bye!", "Goodbye!"]),
    ("You write down what you want with kubectl apply. The API server checks the object and stores it. "
     "The operator sees it and asks the planner which nodes can hold the model. It makes a ModelCopy for each node that lacks the "
     "files, and a ShardGroup with one Shard for each rank. Each agent fetches the files, checks every byte and starts an engine. "
     "The engines find each other and load their own part of the model. When the group answers a first question, it is ready. "
     "The gateway then sends requests to it, and the tokens come straight back.",
     ["Tell me the whole story.", "How does Russet serve a model?", "Explain Russet at length.", "Tell me a long story.", "How does a model get served?"]),
]

REFUSAL = "I only know sums, weekdays and Russet."

# Questions outside what the model learns. `{}` takes a word from UNKNOWN_THINGS.
UNKNOWN_SHAPES = [
    "What is {}?", "Tell me about {}.", "Who invented {}?", "Where is {}?", "How do I make {}?", "Do you like {}?",
    "Write a poem about {}.", "What is the price of {}?", "How old is {}?", "Explain {}.", "Why is {} so famous?",
    "Can you find {}?", "Translate {} into French.", "What colour is {}?", "How big is {}?", "Sing about {}.",
]
UNKNOWN_THINGS = [
    "Paris", "the moon", "bread", "music", "football", "chess", "the sea", "a horse", "London", "gold", "coffee", "tea", "snow",
    "the sun", "a cat", "a dog", "painting", "France", "China", "a river", "rain", "chocolate", "a bicycle", "the president",
    "history", "poetry", "Berlin", "a piano", "soup", "an apple", "the weather", "love", "Mars", "a tiger", "cheese", "glass",
    "iron", "a garden", "the ocean", "a train", "Shakespeare", "Einstein", "Mozart", "Rome", "a castle", "butter", "salt",
    "the stock market", "a whale", "winter", "summer", "a robot", "my shoes", "your mother", "lunch", "dinner", "a cake",
]
UNKNOWN_PLAIN = [
    "Who won the match?", "What time is it?", "How is the weather today?", "Tell me a joke.", "What is the meaning of life?",
    "Who is the president of France?", "What is the capital of France?", "Can you drive a car?", "Sing me a song.",
    "Write a program for me.", "How tall are you?", "Where do you live?", "Are you happy?", "What should I eat tonight?",
    "Which film should I watch?", "Play some music.", "Call my brother.", "Open the door.", "What is love?",
]
